"""Archives of usage records: files in the blob store that hold what left the table `usage`, each
with the hash of the one before (`archive_file`), how they are made (`archiver`), and how they are
checked (`verification`).

The ledger itself, its sums and invoices are in `billing`.
"""
