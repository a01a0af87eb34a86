"""What every picture and every long command has in common."""
