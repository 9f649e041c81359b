"""The adapters that are loaded while the server runs, in every process that needs to know of them."""
