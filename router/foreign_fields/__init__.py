"""Fields of other servers' APIs: accepted where their value asks for nothing, and named in a response header."""
