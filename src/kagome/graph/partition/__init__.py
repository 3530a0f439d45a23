"""Parts of a graph, as ranks and files hold them."""
