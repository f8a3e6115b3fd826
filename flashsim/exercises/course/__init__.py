"""The bundled exercises, one file each, in the order of the course."""
