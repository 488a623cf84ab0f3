"""What the kernel is asked for and tells: processes, control groups, network namespaces and rules,
name servers, files that appear whole.

Nothing here knows of functions or tenants.
"""
