"""What is computed: ready models, and how a user's forward is called."""
