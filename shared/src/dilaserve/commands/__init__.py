"""The `dilaserve` commands that need no service's code; one module each, imported when called."""
