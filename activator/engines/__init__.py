"""Instances that are language models' servers, as the activator sees them.

`exposition.py` reads an engine's own metrics, `views.py` makes of them what is known of an instance, `scrape.py` asks each now and then;
`affinity.py` says which instance a prompt's beginning belongs to, `throttler.py` puts both to use: an instance takes as many calls as its
KV memory allows, and calls that begin alike meet where that beginning is in memory already. Ordinary functions pay for none of it.
"""
