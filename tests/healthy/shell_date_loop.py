"""A shell loop appends a date each half second."""
# expect: slow=yes command="sh -c 'i=0; while [ $i -lt 28 ]; do sleep 0.5; date >> dates; i=$((i+1)); done'"
