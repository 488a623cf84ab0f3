"""Tokens of language models where calls come in: what a call asks for, what it may have, what it used.

`facts` reads a request, `estimates` knows how long its prompt is, `enter` lets it in, `use` counts until its end.
"""
