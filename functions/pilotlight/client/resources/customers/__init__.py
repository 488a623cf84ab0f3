"""Client methods for customers of the tenant."""
