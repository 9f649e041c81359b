"""GBNF, llama.cpp's notation of grammars: read, and written in the notations of the backends."""
