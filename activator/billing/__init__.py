"""Metering and billing of calls: measure a call, record it durably before it runs, ship the record
to the ledger exactly once.

`meter.py` divides an instance's time among its calls, `usage_pricing.py` formats records,
`instance_meter.py` connects both to the journal, `segments.py` and `journal_format.py` define the
journal's files and format, `journal.py` is its only writer, `recovery.py` reads the journal of a
dead process, `shipping.py` sends records to the ledger."""
