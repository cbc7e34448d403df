"""Sample data and load: a fictional school platform."""
