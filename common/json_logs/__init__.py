"""`--log-format json`: one JSON object per line of the log, for programs that read it."""
