"""A name that does not resolve."""

# expect: slow=yes cause=network exit=1
import urllib.request

urllib.request.urlopen("http://no-such-host.invalid/x")
