"""What people already call, answered by tilewise; each peer is imported only in the file that is named after it."""
