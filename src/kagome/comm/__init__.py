"""Communication between ranks: meshes, channels, exchanges, reductions and codecs."""
