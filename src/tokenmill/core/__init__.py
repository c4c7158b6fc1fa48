"""Types, messages, configuration, errors and time. Imports nothing else of the package."""
