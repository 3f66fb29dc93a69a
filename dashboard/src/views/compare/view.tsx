import { Empty } from "../../ui/state";

export default function View() {
  return <Empty><p>compare/view</p></Empty>;
}
