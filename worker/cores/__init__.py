"""The cores of a host, shared by its workers. Without it each engine uses as many threads as there are cores."""
