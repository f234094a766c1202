"""`mini-infer serve`, under the name that it had in the educational engine: python examples/serve.py --help"""

from cli.main import serve

raise SystemExit(serve())
