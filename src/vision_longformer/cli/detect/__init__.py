"""``vil detect``: the commands of object detection."""
