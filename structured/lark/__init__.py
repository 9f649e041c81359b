"""Lark grammars of clients, in llguidance's dialect: read, and written as parts of other grammars."""
