"""From a running call to a line in the ledger: measured, written down before anything runs,
shipped, never lost or doubled.

`meter.py` shares an instance's time among its calls, `usage.py` formats records,
`instance_meter.py` joins both to the journal, `segments.py` and `journal_format.py` are the
journal's files and format, `journal.py` its only writer, `recovery.py` reads what a dead process
left, `shipping.py` brings records to the ledger."""
