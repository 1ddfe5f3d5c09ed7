"""What pdserve processes say to each other; not for clients."""
