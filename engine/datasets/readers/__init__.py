"""One module per format. A reader converts untrusted bytes into columns, in bounded memory."""
