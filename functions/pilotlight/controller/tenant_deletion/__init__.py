"""Deletion of tenants: what is deleted and what is kept (`tenant_tables`), how far each deletion is
(`progress`), and the task that goes through its steps (`deleter`).

Single apps, environments, volumes and other things of a tenant are deleted elsewhere.
"""
