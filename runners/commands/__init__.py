"""The command line: an application on top of the library."""
