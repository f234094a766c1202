"""`mini-infer demo`, under the name that it had in the educational engine: python examples/demo.py --help"""

from cli.main import demo

raise SystemExit(demo())
