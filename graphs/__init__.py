"""Floor 2: message passing on graphs in half precision. It is not built yet."""
