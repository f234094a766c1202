"""The command line: starts the services, talks to them, measures them. Imports their settings only."""
