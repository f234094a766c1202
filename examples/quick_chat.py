"""`mini-infer chat`, under the name that it had in the educational engine: python examples/quick_chat.py --help"""

from cli.main import chat

raise SystemExit(chat())
