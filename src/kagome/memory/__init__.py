"""What ranks hold and will hold, by kind."""
