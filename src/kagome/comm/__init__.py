"""What crosses between ranks: meshes, channels, exchanges, reductions and codecs."""
