"""What saves CPU time while a process imports the platform: data classes and packages that run less
code at import."""
