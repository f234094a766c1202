"""Services of a local cluster that are started again when they end."""
