"""One file a format. A reader turns bytes from strangers into columns, in bounded memory."""
