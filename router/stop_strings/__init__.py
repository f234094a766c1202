"""Stop strings: texts from the client that end an answer."""
