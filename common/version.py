"""The project's version: in the package's metadata, `mini_infer.__version__`, GET /version and WorkerInfo."""

VERSION = "0.1.0"
