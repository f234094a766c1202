"""The page at `/`: a chat, and the cluster as it is now. Its figures come as server-sent events."""
