"""The formats of files, one module each: it registers its formats as ``FORMATS``.

A reader converts untrusted bytes into columns, in bounded memory. A module without ``FORMATS``
reads something other than a file.
"""
