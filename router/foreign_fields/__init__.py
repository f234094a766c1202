"""Fields of other servers' requests, which this one takes where they ask for nothing, and tells of in a header."""
