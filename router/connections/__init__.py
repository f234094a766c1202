"""HTTP connections of clients: protocol, bounds, watching, writing chunks."""
