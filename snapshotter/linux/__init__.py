"""Interfaces to the Linux kernel: processes, cgroups, network namespaces and rules, name servers,
atomic directories.

Independent of functions and tenants.
"""
