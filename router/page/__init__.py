"""The page at `/`: a chat, and the current state of the cluster from server-sent events."""
