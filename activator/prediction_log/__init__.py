"""Prediction logs: rows about a share of the calls of functions that declare `log=`, written as
Parquet files behind the answers.

    call ─▶ queue (memory, bounded) ─▶ writer process: parse, scrub, spool (disk, bounded), Parquet
         ─▶ shipper ─▶ controller ─▶ blob store

The activator's own process decides which calls are logged, and moves bytes: it neither parses nor
converts them. A row that finds no room at any step is dropped and counted; no call waits, and none
fails. Rows are lost with the memory that they are in: those of the last moments before the
activator or the writer is killed. From the spool on, rows arrive in the store exactly once."""
