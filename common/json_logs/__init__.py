"""`--log-format json`: the log as one JSON object per line, for programs that read it."""
