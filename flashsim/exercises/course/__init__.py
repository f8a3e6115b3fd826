"""The exercises that come along, one file each, in the order of the course."""
