"""What makes imports of the platform's processes cheaper."""
