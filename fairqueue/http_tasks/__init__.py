"""Tasks that call a URL."""
