"""What crosses between ranks."""
