// The last minutes of changing values, kept while a page is open.
import { useEffect, useRef, useState } from "preact/hooks";

const KEPT = 150;

/** The newest values, one every `everyMs`, the oldest first. */
export function useHistory<T>(value: T, everyMs = 2000): readonly T[] {
  const newest = useRef(value);
  newest.current = value;
  const [values, setValues] = useState<readonly T[]>([value]);
  useEffect(() => {
    const timer = setInterval(() => setValues((before) => [...before.slice(1 - KEPT), newest.current]), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return values;
}
