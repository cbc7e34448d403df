"""Made-up data and work: a school platform to look at."""
