"""Functions that the platform calls by itself."""

import datetime as dt

import pilotlight as modal

app = modal.App("style-schedules")


@app.function(schedule=modal.Cron("30 6 * * 1-5", timezone="Europe/Vienna"))
def report() -> str:
    return f"report of {dt.date(2026, 1, 5):%d %B}"


@app.function(schedule=modal.Period(hours=4), timeout=600, retries=2)
def clean() -> None:
    print("cleaned")


@app.local_entrypoint()
def main() -> None:
    print(report.remote())
